"""Shared parts of node types: templates, conditions, nested graphs, models, tools."""
