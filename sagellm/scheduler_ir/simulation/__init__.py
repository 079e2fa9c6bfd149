"""LMDeploy's scheduling loop without a model: strategies and recorded runs are played on it, on a virtual clock."""
