variable "name" {
  description = "Name of everything, and the namespace of the chart."
  type        = string
  default     = "[[ name ]]"
}

variable "region" {
  type    = string
  default = "eu-central-1"
}

variable "admin_cidrs" {
  description = "Networks from which kubectl may reach the cluster; no default, since the whole internet would be a bad one."
  type        = list(string)
}

variable "kubernetes_version" {
  type    = string
  default = "1.33"
}

variable "general_instance" {
  type    = string
  default = "m7i.xlarge"
}

variable "general_max" {
  description = "Nodes for agents, at most; agents that compute need machines (docs/production.md)."
  type        = number
  default     = 6
}

variable "gpu_instance" {
  description = "One L40S (48 GB) trains up to about 1.5B parameters with AdamW; p5.48xlarge has eight H100."
  type        = string
  default     = "g6e.2xlarge"
}

variable "gpu_nodes" {
  type    = number
  default = 1
}

variable "database_instance" {
  type    = string
  default = "db.m7g.large"
}
