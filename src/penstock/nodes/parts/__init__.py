"""What several node types are made of: reading their data, templates, conditions, nested graphs, models, tools."""
