"""How requests reach the service: one file a transport."""
