"""`expertctl bench path`: where the time of a request goes, beside bare bytes of the same run."""
