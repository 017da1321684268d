"""New weights of what is held, while it is served: updates, versions, rollback."""
