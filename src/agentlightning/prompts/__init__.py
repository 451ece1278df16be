"""Prompt templates, which runs keep as versioned resources."""
