"""Many prompts, many processes, nothing lost."""
