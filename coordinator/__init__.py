"""The brain: placement, request flow, speculation, text. No torch: it runs on a host without any GPU."""
