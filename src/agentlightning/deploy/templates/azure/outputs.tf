output "kubeconfig" {
  value = "az aks get-credentials --resource-group ${azurerm_resource_group.main.name} --name ${azurerm_kubernetes_cluster.main.name}"
}

output "store_url" {
  description = "For the Secret that values.yaml names as store."
  value       = "postgresql://agl:${random_password.database.result}@${azurerm_postgresql_flexible_server.main.fqdn}:5432/agl?sslmode=require"
  sensitive   = true
}

output "checkpoint_url" {
  description = "For trainer.checkpoint_url of the configuration."
  value       = "abfs://runs@${azurerm_storage_account.runs.name}.dfs.core.windows.net/runs"
}

output "trainer_client_id" {
  description = "For trainer.identity of values.yaml."
  value       = azurerm_user_assigned_identity.trainer.client_id
}
