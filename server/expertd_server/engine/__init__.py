"""One thread that owns the device: requests in, batches computed, outcomes out.  Knows no transport."""
