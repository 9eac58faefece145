"""The RoBERTa and XLM-RoBERTa families of transformers, for shardcore."""
