"""Demos with a small real model: what they ask, and the one that starts a deployment."""
