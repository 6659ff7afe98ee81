"""Predictions and templates of tool calls over HTTP, in or before any server with OpenAI's API."""
