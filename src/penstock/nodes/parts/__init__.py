"""Shared parts of node types: reading their data, templates, conditions, nested graphs, models, tools."""
