"""`expertctl bench faults`: servers of this host are killed, stopped, restarted, slowed and cut off under load, while a
cluster's answers are checked."""
