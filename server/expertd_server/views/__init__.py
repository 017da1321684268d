"""What operators see: metrics, Describe, tables of decisions."""
