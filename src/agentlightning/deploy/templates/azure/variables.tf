variable "name" {
  description = "Name of everything, and the namespace of the chart."
  type        = string
  default     = "[[ name ]]"
}

variable "subscription_id" {
  type = string
}

variable "location" {
  type    = string
  default = "westeurope"
}

variable "admin_cidrs" {
  description = "Networks from which kubectl may reach the cluster; no default, since the whole internet would be a bad one."
  type        = list(string)
}

variable "kubernetes_version" {
  type    = string
  default = "1.33"
}

variable "general_size" {
  type    = string
  default = "Standard_D4s_v5"
}

variable "general_max" {
  description = "Nodes for agents, at most; agents that compute need machines (docs/production.md)."
  type        = number
  default     = 6
}

variable "gpu_size" {
  description = "One A100 (80 GB) trains up to about 3B parameters with AdamW; Standard_ND96isr_H100_v5 has eight H100."
  type        = string
  default     = "Standard_NC24ads_A100_v4"
}

variable "gpu_nodes" {
  type    = number
  default = 1
}

variable "database_sku" {
  type    = string
  default = "GP_Standard_D2ds_v5"
}
