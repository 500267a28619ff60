"""What is known of diffusers' models: layers, calls, guidance, prompts, loading."""
