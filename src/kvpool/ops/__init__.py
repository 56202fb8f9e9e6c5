"""What operators run beside the engines."""
