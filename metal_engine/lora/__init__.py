"""LoRA adapters: their files, their slots on the device, and their arithmetic."""
