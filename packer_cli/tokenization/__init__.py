"""From texts to tokens: finding a tokenizer, its engines, what holds them to each other."""
