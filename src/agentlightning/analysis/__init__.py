"""Stored runs for people: tables for notebooks, and what an agent did, call by call."""
