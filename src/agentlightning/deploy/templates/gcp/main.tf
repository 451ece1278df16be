# [[ name ]] on Google Cloud: a network, GKE with a pool for agents and one with GPUs, PostgreSQL (Cloud SQL) and a bucket (GCS).
# For OpenTofu and Terraform. Never applied by its authors, and no provider has checked it: read the plan.

terraform {
  required_version = ">= 1.6"
  required_providers {
    google = { source = "hashicorp/google", version = "~> 6.14" }
    random = { source = "hashicorp/random", version = "~> 3.6" }
  }
  # The state holds the database's password. Keep it in a bucket of yours: add a backend "gcs" here.
}

locals {
  name   = "[[ name ]]"
  region = "europe-west4"
}

provider "google" {
  project = var.project
  region  = local.region
}

resource "google_compute_network" "main" {
  name                    = local.name
  auto_create_subnetworks = false
}

resource "google_compute_subnetwork" "main" {
  name                     = local.name
  network                  = google_compute_network.main.id
  ip_cidr_range            = "10.40.0.0/20"
  private_ip_google_access = true
  secondary_ip_range {
    range_name    = "pods"
    ip_cidr_range = "10.44.0.0/14"
  }
  secondary_ip_range {
    range_name    = "services"
    ip_cidr_range = "10.41.0.0/20"
  }
}

# Nodes have no public addresses; what they download goes through NAT.
resource "google_compute_router" "main" {
  name    = local.name
  network = google_compute_network.main.id
}

resource "google_compute_router_nat" "main" {
  name                               = local.name
  router                             = google_compute_router.main.name
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "ALL_SUBNETWORKS_ALL_IP_RANGES"
}

resource "google_container_cluster" "main" {
  name                     = local.name
  location                 = "europe-west4-a"
  network                  = google_compute_network.main.id
  subnetwork               = google_compute_subnetwork.main.id
  remove_default_node_pool = true
  initial_node_count       = 1
  deletion_protection      = true
  # Dataplane V2 enforces NetworkPolicies: without it agents reach everything.
  datapath_provider = "ADVANCED_DATAPATH"
  workload_identity_config { workload_pool = "${var.project}.svc.id.goog" }
  ip_allocation_policy {
    cluster_secondary_range_name  = "pods"
    services_secondary_range_name = "services"
  }
  private_cluster_config {
    enable_private_nodes    = true
    enable_private_endpoint = false
    master_ipv4_cidr_block  = "172.16.0.0/28"
  }
  master_authorized_networks_config {
    dynamic "cidr_blocks" {
      for_each = var.admin_cidrs
      content { cidr_block = cidr_blocks.value }
    }
  }
}

resource "google_container_node_pool" "general" {
  name     = "general"
  cluster  = google_container_cluster.main.id
  location = "europe-west4-a"
  autoscaling {
    min_node_count = 2
    max_node_count = 6
  }
  node_config {
    machine_type = "e2-standard-4"
    labels       = { pool = "general" }
    oauth_scopes = ["https://www.googleapis.com/auth/cloud-platform"]
    workload_metadata_config { mode = "GKE_METADATA" }
  }
}

# GPUs cost by the hour whether they compute or not: gpu_nodes says how many. GKE taints the pool itself (nvidia.com/gpu).
resource "google_container_node_pool" "gpu" {
  name       = "gpu"
  cluster    = google_container_cluster.main.id
  location   = "europe-west4-a"
  node_count = var.gpu_nodes
  node_config {
    machine_type = "a2-highgpu-1g"
    disk_size_gb = 200
    labels       = { pool = "gpu" }
    oauth_scopes = ["https://www.googleapis.com/auth/cloud-platform"]
    guest_accelerator {
      type  = "nvidia-tesla-a100"
      count = 1
      gpu_driver_installation_config { gpu_driver_version = "LATEST" }
    }
    workload_metadata_config { mode = "GKE_METADATA" }
  }
}

# The database is reached through a peering with Google's network, and has no public address.
resource "google_compute_global_address" "database" {
  name          = "${local.name}-database"
  purpose       = "VPC_PEERING"
  address_type  = "INTERNAL"
  prefix_length = 20
  network       = google_compute_network.main.id
}

resource "google_service_networking_connection" "database" {
  network                 = google_compute_network.main.id
  service                 = "servicenetworking.googleapis.com"
  reserved_peering_ranges = [google_compute_global_address.database.name]
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

resource "google_sql_database_instance" "main" {
  # The name of one that was deleted cannot be had for a week.
  name                = "${local.name}-${random_string.suffix.result}"
  database_version    = "POSTGRES_17"
  deletion_protection = true
  settings {
    tier              = "db-custom-2-8192"
    edition           = "ENTERPRISE"
    availability_type = "REGIONAL"
    disk_size         = 50
    disk_autoresize   = true
    ip_configuration {
      ipv4_enabled    = false
      private_network = google_compute_network.main.id
      ssl_mode        = "ENCRYPTED_ONLY"
    }
    backup_configuration {
      enabled                        = true
      point_in_time_recovery_enabled = true
    }
  }
  depends_on = [google_service_networking_connection.database]
}

resource "google_sql_database" "agl" {
  name     = "agl"
  instance = google_sql_database_instance.main.name
}

resource "google_sql_user" "agl" {
  name     = "agl"
  instance = google_sql_database_instance.main.name
  password = random_password.database.result
}

resource "google_storage_bucket" "runs" {
  name                        = "${local.name}-runs-${random_string.suffix.result}"
  location                    = local.region
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"
  versioning { enabled = true }
}

# Checkpoints go to s3:// URLs: of GCS by its S3-compatible interface, which wants a key of a service account (HMAC).
resource "google_service_account" "trainer" { account_id = "${local.name}-trainer" }

resource "google_storage_bucket_iam_member" "trainer" {
  bucket = google_storage_bucket.runs.name
  role   = "roles/storage.objectAdmin"
  member = "serviceAccount:${google_service_account.trainer.email}"
}

resource "google_storage_hmac_key" "trainer" { service_account_email = google_service_account.trainer.email }

variable "project" { type = string }

variable "admin_cidrs" { type = list(string) }

variable "gpu_nodes" {
  type    = number
  default = 1
}

output "kubeconfig" {
  value = "gcloud container clusters get-credentials ${google_container_cluster.main.name} --zone europe-west4-a --project ${var.project}"
}

output "store_url" {
  description = "For the Secret agl-store."
  value       = "postgresql://agl:${random_password.database.result}@${google_sql_database_instance.main.private_ip_address}:5432/agl?sslmode=require"
  sensitive   = true
}

output "checkpoint_url" {
  description = "For trainer.checkpoint_url of the configuration, with AWS_ENDPOINT_URL=https://storage.googleapis.com."
  value       = "s3://${google_storage_bucket.runs.name}/runs"
}

output "trainer_access_key" {
  description = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of the trainer."
  value       = { id = google_storage_hmac_key.trainer.access_id, secret = google_storage_hmac_key.trainer.secret }
  sensitive   = true
}
