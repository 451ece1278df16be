# [[ name ]] on Azure: a network, AKS with a pool for agents and one with GPUs, PostgreSQL (Flexible Server) and a container (Blob).
# Plain resources and no modules of others: everything that is made stands here. For OpenTofu and Terraform.
#
# Never applied by whoever wrote it: `terraform fmt` and a parser have read it, the providers' schemas have not. Read the plan.

terraform {
  required_version = ">= 1.6"
  required_providers {
    azurerm = {
      source  = "hashicorp/azurerm"
      version = "~> 4.14"
    }
    random = {
      source  = "hashicorp/random"
      version = "~> 3.6"
    }
  }
  # The state holds the database's password. Keep it in a storage account of yours: add a backend "azurerm" here.
}

provider "azurerm" {
  subscription_id = var.subscription_id
  features {}
}

resource "azurerm_resource_group" "main" {
  name     = var.name
  location = var.location
}

resource "azurerm_virtual_network" "main" {
  name                = var.name
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
  name                      = var.name
  location                  = azurerm_resource_group.main.location
  resource_group_name       = azurerm_resource_group.main.name
  dns_prefix                = var.name
  kubernetes_version        = var.kubernetes_version
  oidc_issuer_enabled       = true
  workload_identity_enabled = true
  # KEDA comes with AKS.
  workload_autoscaler_profile {
    keda_enabled = true
  }
  api_server_access_profile {
    authorized_ip_ranges = var.admin_cidrs
  }
  default_node_pool {
    name                        = "general"
    vm_size                     = var.general_size
    auto_scaling_enabled        = true
    min_count                   = 2
    max_count                   = var.general_max
    vnet_subnet_id              = azurerm_subnet.nodes.id
    temporary_name_for_rotation = "rotation"
    node_labels                 = { pool = "general" }
  }
  identity {
    type = "SystemAssigned"
  }
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
  vm_size               = var.gpu_size
  node_count            = var.gpu_nodes
  vnet_subnet_id        = azurerm_subnet.nodes.id
  node_labels           = { pool = "gpu" }
  node_taints           = ["nvidia.com/gpu=present:NoSchedule"]
}

resource "azurerm_private_dns_zone" "database" {
  name                = "${var.name}.private.postgres.database.azure.com"
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
  name                          = "${var.name}-${random_string.suffix.result}"
  location                      = azurerm_resource_group.main.location
  resource_group_name           = azurerm_resource_group.main.name
  version                       = "17"
  sku_name                      = var.database_sku
  storage_mb                    = 65536
  auto_grow_enabled             = true
  backup_retention_days         = 7
  administrator_login           = "agl"
  administrator_password        = random_password.database.result
  delegated_subnet_id           = azurerm_subnet.database.id
  private_dns_zone_id           = azurerm_private_dns_zone.database.id
  public_network_access_enabled = false
  high_availability {
    mode = "ZoneRedundant"
  }
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
  blob_properties {
    versioning_enabled = true
  }
}

resource "azurerm_storage_container" "runs" {
  name               = "runs"
  storage_account_id = azurerm_storage_account.runs.id
}

# The trainer's pods alone may use the container, by workload identity: no key of Azure is in the cluster.
resource "azurerm_user_assigned_identity" "trainer" {
  name                = "${var.name}-trainer"
  location            = azurerm_resource_group.main.location
  resource_group_name = azurerm_resource_group.main.name
}

resource "azurerm_federated_identity_credential" "trainer" {
  name                = "trainer"
  resource_group_name = azurerm_resource_group.main.name
  parent_id           = azurerm_user_assigned_identity.trainer.id
  issuer              = azurerm_kubernetes_cluster.main.oidc_issuer_url
  subject             = "system:serviceaccount:${var.name}:agl-trainer"
  audience            = ["api://AzureADTokenExchange"]
}

resource "azurerm_role_assignment" "trainer" {
  scope                = azurerm_storage_container.runs.id
  role_definition_name = "Storage Blob Data Contributor"
  principal_id         = azurerm_user_assigned_identity.trainer.principal_id
}
