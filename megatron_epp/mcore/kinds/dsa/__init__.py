"""DeepSeek sparse attention (DSA)."""
