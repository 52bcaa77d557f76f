"""See fused_attn.py."""
