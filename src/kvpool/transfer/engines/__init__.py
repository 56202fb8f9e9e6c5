"""Transfer engines behind one contract (transfer/base.py)."""
