"""A batch as rows of memory that belongs to its callers: gathered from and delivered to where a table says."""
