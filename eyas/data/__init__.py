"""Raw conversation sets -> cleaned user prompts: readers, filters and the stage `prompts`."""
