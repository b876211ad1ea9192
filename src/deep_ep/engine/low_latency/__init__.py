"""Low-latency mode: dispatch and combine for decoding, without an exchange of counts (`docs/low-latency.md`)."""
