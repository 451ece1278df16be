"""The runner whose attempts are Jobs of a Kubernetes cluster."""
