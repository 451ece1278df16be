# [[ name ]] on Azure: a network, AKS with a pool for agents and one with GPUs, PostgreSQL (Flexible Server) and a container (Blob).
# For OpenTofu and Terraform. Never applied by its authors, and no provider has checked it: read the plan.

terraform {
  required_version = ">= 1.6"
  required_providers {
    azurerm = { source = "hashicorp/azurerm", version = "~> 4.14" }
    random = { source = "hashicorp/random", version = "~> 3.6" }
  }
  # The state holds the database's password. Keep it in a storage account of yours: add a backend "azurerm" here.
}

locals {
  name     = "[[ name ]]"
  location = "westeurope"
}

provider "azurerm" {
  subscription_id = var.subscription_id
  features {}
}

resource "azurerm_resource_group" "main" {
  name     = local.name
  location = local.location
}

resource "azurerm_virtual_network" "main" {
  name                = local.name
  location            = azurerm_resource_group.main.location
  resource_group_name = azurerm_resource_group.main.name
  address_space       = ["10.40.0.0/16"]
}

resource "azurerm_subnet" "nodes" {
  name                 = "nodes"
  resource_group_name  = azurerm_resource_group.main.name
  virtual_network_name = azurerm_virtual_network.main.name
  address_prefixes     = ["10.40.0.0/20"]
}

resource "azurerm_subnet" "database" {
  name                 = "database"
  resource_group_name  = azurerm_resource_group.main.name
  virtual_network_name = azurerm_virtual_network.main.name
  address_prefixes     = ["10.40.16.0/24"]
  delegation {
    name = "postgres"
    service_delegation {
      name    = "Microsoft.DBforPostgreSQL/flexibleServers"
      actions = ["Microsoft.Network/virtualNetworks/subnets/join/action"]
    }
  }
}

resource "azurerm_kubernetes_cluster" "main" {
  name                      = local.name
  location                  = azurerm_resource_group.main.location
  resource_group_name       = azurerm_resource_group.main.name
  dns_prefix                = local.name
  kubernetes_version        = "1.33"
  oidc_issuer_enabled       = true
  workload_identity_enabled = true
  api_server_access_profile { authorized_ip_ranges = var.admin_cidrs }
  default_node_pool {
    name                        = "general"
    vm_size                     = "Standard_D4s_v5"
    auto_scaling_enabled        = true
    min_count                   = 2
    max_count                   = 6
    vnet_subnet_id              = azurerm_subnet.nodes.id
    temporary_name_for_rotation = "rotation"
    node_labels                 = { pool = "general" }
  }
  identity { type = "SystemAssigned" }
  # Cilium enforces NetworkPolicies: without such a plug-in agents reach everything.
  network_profile {
    network_plugin      = "azure"
    network_plugin_mode = "overlay"
    network_data_plane  = "cilium"
    network_policy      = "cilium"
    pod_cidr            = "10.244.0.0/16"
    service_cidr        = "10.41.0.0/16"
    dns_service_ip      = "10.41.0.10"
  }
}

# GPUs cost by the hour whether they compute or not: gpu_nodes says how many. The taint keeps other pods away.
resource "azurerm_kubernetes_cluster_node_pool" "gpu" {
  name                  = "gpu"
  kubernetes_cluster_id = azurerm_kubernetes_cluster.main.id
  vm_size               = "Standard_NC24ads_A100_v4"
  node_count            = var.gpu_nodes
  vnet_subnet_id        = azurerm_subnet.nodes.id
  node_labels           = { pool = "gpu" }
  node_taints           = ["nvidia.com/gpu=present:NoSchedule"]
}

resource "azurerm_private_dns_zone" "database" {
  name                = "${local.name}.private.postgres.database.azure.com"
  resource_group_name = azurerm_resource_group.main.name
}

resource "azurerm_private_dns_zone_virtual_network_link" "database" {
  name                  = "database"
  resource_group_name   = azurerm_resource_group.main.name
  private_dns_zone_name = azurerm_private_dns_zone.database.name
  virtual_network_id    = azurerm_virtual_network.main.id
}

resource "random_password" "database" {
  length  = 32
  special = false
}

resource "random_string" "suffix" {
  length  = 6
  special = false
  upper   = false
}

resource "azurerm_postgresql_flexible_server" "main" {
  name                          = "${local.name}-${random_string.suffix.result}"
  location                      = azurerm_resource_group.main.location
  resource_group_name           = azurerm_resource_group.main.name
  version                       = "17"
  sku_name                      = "GP_Standard_D2ds_v5"
  storage_mb                    = 65536
  auto_grow_enabled             = true
  backup_retention_days         = 7
  administrator_login           = "agl"
  administrator_password        = random_password.database.result
  delegated_subnet_id           = azurerm_subnet.database.id
  private_dns_zone_id           = azurerm_private_dns_zone.database.id
  public_network_access_enabled = false
  high_availability { mode = "ZoneRedundant" }
  lifecycle {
    prevent_destroy = true
    ignore_changes  = [zone, high_availability[0].standby_availability_zone]
  }
  depends_on = [azurerm_private_dns_zone_virtual_network_link.database]
}

resource "azurerm_postgresql_flexible_server_database" "agl" {
  name      = "agl"
  server_id = azurerm_postgresql_flexible_server.main.id
}

resource "azurerm_storage_account" "runs" {
  name                            = "agl${random_string.suffix.result}"
  location                        = azurerm_resource_group.main.location
  resource_group_name             = azurerm_resource_group.main.name
  account_tier                    = "Standard"
  account_replication_type        = "ZRS"
  allow_nested_items_to_be_public = false
  blob_properties { versioning_enabled = true }
}

resource "azurerm_storage_container" "runs" {
  name               = "runs"
  storage_account_id = azurerm_storage_account.runs.id
}

# The trainer's pods alone may use the container, by workload identity: no key of Azure is in the cluster.
resource "azurerm_user_assigned_identity" "trainer" {
  name                = "${local.name}-trainer"
  location            = azurerm_resource_group.main.location
  resource_group_name = azurerm_resource_group.main.name
}

resource "azurerm_federated_identity_credential" "trainer" {
  name                = "trainer"
  resource_group_name = azurerm_resource_group.main.name
  parent_id           = azurerm_user_assigned_identity.trainer.id
  issuer              = azurerm_kubernetes_cluster.main.oidc_issuer_url
  subject             = "system:serviceaccount:${local.name}:agl-trainer"
  audience            = ["api://AzureADTokenExchange"]
}

resource "azurerm_role_assignment" "trainer" {
  scope                = azurerm_storage_container.runs.id
  role_definition_name = "Storage Blob Data Contributor"
  principal_id         = azurerm_user_assigned_identity.trainer.principal_id
}

variable "subscription_id" { type = string }

variable "admin_cidrs" { type = list(string) }

variable "gpu_nodes" {
  type    = number
  default = 1
}

output "kubeconfig" {
  value = "az aks get-credentials --resource-group ${azurerm_resource_group.main.name} --name ${azurerm_kubernetes_cluster.main.name}"
}

output "store_url" {
  description = "For the Secret agl-store."
  value       = "postgresql://agl:${random_password.database.result}@${azurerm_postgresql_flexible_server.main.fqdn}:5432/agl?sslmode=require"
  sensitive   = true
}

output "checkpoint_url" {
  description = "For trainer.checkpoint_url of the configuration."
  value       = "abfs://runs@${azurerm_storage_account.runs.name}.dfs.core.windows.net/runs"
}

output "trainer_client_id" {
  description = "For kubernetes/trainer.yaml."
  value       = azurerm_user_assigned_identity.trainer.client_id
}
