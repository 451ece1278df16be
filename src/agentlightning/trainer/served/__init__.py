"""Served models: registered versions that users ask, without a trainer."""
