# [[ name ]] on AWS: a network, EKS with a group of nodes for agents and one with GPUs, PostgreSQL (RDS) and a bucket (S3).
# For OpenTofu and Terraform. Never applied by its authors, and no provider has checked it: read the plan.

terraform {
  required_version = ">= 1.6"
  required_providers {
    aws = { source = "hashicorp/aws", version = "~> 5.80" }
    random = { source = "hashicorp/random", version = "~> 3.6" }
  }
  # The state holds the database's password. Keep it in a bucket of yours, encrypted: add a backend "s3" here.
}

locals {
  name   = "[[ name ]]"
  region = "eu-central-1"
}

provider "aws" {
  region = local.region
  default_tags { tags = { project = local.name } }
}

data "aws_availability_zones" "available" { state = "available" }

# Two zones: EKS and RDS need them. Nodes have no public addresses; what they download goes through one NAT gateway.
module "vpc" {
  source             = "terraform-aws-modules/vpc/aws"
  version            = "~> 5.16"
  name               = local.name
  cidr               = "10.40.0.0/16"
  azs                = slice(data.aws_availability_zones.available.names, 0, 2)
  private_subnets    = ["10.40.0.0/20", "10.40.16.0/20"]
  public_subnets     = ["10.40.128.0/24", "10.40.129.0/24"]
  enable_nat_gateway = true
  single_nat_gateway = true
}

module "eks" {
  source                                   = "terraform-aws-modules/eks/aws"
  version                                  = "~> 20.31"
  cluster_name                             = local.name
  cluster_version                          = "1.33"
  vpc_id                                   = module.vpc.vpc_id
  subnet_ids                               = module.vpc.private_subnets
  cluster_endpoint_public_access           = true
  cluster_endpoint_public_access_cidrs     = var.admin_cidrs
  enable_cluster_creator_admin_permissions = true
  cluster_addons = {
    # The VPC CNI enforces NetworkPolicies once it is told to: without this agents reach everything.
    vpc-cni                = { before_compute = true, configuration_values = jsonencode({ enableNetworkPolicy = "true" }) }
    coredns                = {}
    kube-proxy             = {}
    aws-ebs-csi-driver     = {}
    eks-pod-identity-agent = {}
  }
  eks_managed_node_groups = {
    general = {
      instance_types = ["m7i.xlarge"]
      min_size       = 2
      desired_size   = 2
      max_size       = 6
      labels         = { pool = "general" }
    }
    # One L40S (48 GB) trains up to about 1.5B parameters with AdamW; p5.48xlarge has eight H100. The taint keeps other pods away.
    gpu = {
      instance_types = ["g6e.2xlarge"]
      ami_type       = "AL2023_x86_64_NVIDIA"
      disk_size      = 200
      min_size       = 0
      desired_size   = var.gpu_nodes
      max_size       = max(var.gpu_nodes, 1)
      labels         = { pool = "gpu" }
      taints         = { gpu = { key = "nvidia.com/gpu", value = "present", effect = "NO_SCHEDULE" } }
    }
  }
}

resource "aws_security_group" "database" {
  name   = "${local.name}-database"
  vpc_id = module.vpc.vpc_id
  ingress {
    from_port       = 5432
    to_port         = 5432
    protocol        = "tcp"
    security_groups = [module.eks.node_security_group_id]
  }
}

resource "aws_db_subnet_group" "main" {
  name       = local.name
  subnet_ids = module.vpc.private_subnets
}

resource "random_password" "database" {
  length  = 32
  special = false
}

resource "aws_db_instance" "main" {
  identifier                = local.name
  engine                    = "postgres"
  engine_version            = "17"
  instance_class            = "db.m7g.large"
  allocated_storage         = 50
  max_allocated_storage     = 500
  storage_encrypted         = true
  multi_az                  = true
  db_name                   = "agl"
  username                  = "agl"
  password                  = random_password.database.result
  db_subnet_group_name      = aws_db_subnet_group.main.name
  vpc_security_group_ids    = [aws_security_group.database.id]
  backup_retention_period   = 7
  deletion_protection       = true
  final_snapshot_identifier = "${local.name}-final"
}

resource "aws_s3_bucket" "runs" { bucket_prefix = "${local.name}-runs-" }

resource "aws_s3_bucket_public_access_block" "runs" {
  bucket                  = aws_s3_bucket.runs.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_versioning" "runs" {
  bucket = aws_s3_bucket.runs.id
  versioning_configuration { status = "Enabled" }
}

# The trainer's pods alone may use the bucket, and no other: no key of AWS is in the cluster.
resource "aws_iam_role" "trainer" {
  name = "${local.name}-trainer"
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = ["sts:AssumeRole", "sts:TagSession"]
      Principal = { Service = "pods.eks.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy" "trainer" {
  name = "runs"
  role = aws_iam_role.trainer.id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      { Effect = "Allow", Action = ["s3:ListBucket"], Resource = aws_s3_bucket.runs.arn },
      {
        Effect   = "Allow"
        Action   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
        Resource = "${aws_s3_bucket.runs.arn}/*"
      },
    ]
  })
}

resource "aws_eks_pod_identity_association" "trainer" {
  cluster_name    = module.eks.cluster_name
  namespace       = local.name
  service_account = "agl-trainer"
  role_arn        = aws_iam_role.trainer.arn
}

variable "admin_cidrs" { type = list(string) }

variable "gpu_nodes" {
  type    = number
  default = 1
}

output "kubeconfig" {
  value = "aws eks update-kubeconfig --region ${local.region} --name ${module.eks.cluster_name}"
}

output "store_url" {
  description = "For the Secret agl-store."
  value       = "postgresql://agl:${random_password.database.result}@${aws_db_instance.main.endpoint}/agl?sslmode=require"
  sensitive   = true
}

output "checkpoint_url" {
  description = "For trainer.checkpoint_url of the configuration."
  value       = "s3://${aws_s3_bucket.runs.bucket}/runs"
}
