"""The engine over HTTP: OpenAI's interface and one for documents. No tensor code; speaks to the engine only."""
