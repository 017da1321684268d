"""A caller on a GPU of the server's host: copies and words on its stream, nothing on its host."""
