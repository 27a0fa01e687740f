"""Programs that show the package at work; each can be imported and is tested."""
