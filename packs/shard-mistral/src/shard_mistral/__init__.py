"""Mistral, Ministral and Mixtral of transformers for shardcore: policies, found through an entry point."""
