variable "name" {
  description = "Name of everything, and the namespace of the chart."
  type        = string
  default     = "[[ name ]]"
}

variable "project" {
  type = string
}

variable "region" {
  type    = string
  default = "europe-west4"
}

variable "zone" {
  description = "One zone: a node pool with GPUs in it. For the control plane in three, a region."
  type        = string
  default     = "europe-west4-a"
}

variable "admin_cidrs" {
  description = "Networks from which kubectl may reach the cluster; no default, since the whole internet would be a bad one."
  type        = list(string)
}

variable "general_machine" {
  type    = string
  default = "e2-standard-4"
}

variable "general_max" {
  description = "Nodes for agents, at most; agents that compute need machines (docs/production.md)."
  type        = number
  default     = 6
}

variable "gpu_machine" {
  description = "One A100 (40 GB) trains up to about 1.5B parameters with AdamW; a3-highgpu-8g has eight H100."
  type        = string
  default     = "a2-highgpu-1g"
}

variable "gpu_type" {
  type    = string
  default = "nvidia-tesla-a100"
}

variable "gpu_nodes" {
  type    = number
  default = 1
}

variable "database_tier" {
  type    = string
  default = "db-custom-2-8192"
}
