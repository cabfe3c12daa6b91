"""The generate command's parts: options, the engine in this process, a conversation, a file of prompts."""
