"""Tuning: which block sizes are fastest on this device, measured once and stored.  Knows no op by name."""
