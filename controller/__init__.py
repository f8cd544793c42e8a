"""The controller: changes what is served between runs. Canary, baking, healing, rollback and promotion."""
