"""Model Runner V1, which vLLM has frozen: nothing outside imports this folder but `hooks`."""
