"""OpenTelemetry spans of what agents do outside their model calls: in, out, and in process."""
