"""Kimi Delta Attention: its mathematics in torch."""
