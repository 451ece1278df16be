# [[ name ]] on AWS: a network, EKS with a group of nodes for agents and one with GPUs, PostgreSQL (RDS) and a bucket (S3).
# Plain resources and no modules of others: everything that is made stands here. For OpenTofu and Terraform.
#
# Never applied by whoever wrote it: `terraform fmt` and a parser have read it, the providers' schemas have not. Read the plan.

terraform {
  required_version = ">= 1.6"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 5.80"
    }
    random = {
      source  = "hashicorp/random"
      version = "~> 3.6"
    }
  }
  # The state holds the database's password. Keep it in a bucket of yours, encrypted: add a backend "s3" here.
}

provider "aws" {
  region = var.region
  default_tags {
    tags = { project = var.name }
  }
}

data "aws_availability_zones" "available" {
  state = "available"
}

# Two zones: EKS and RDS ask for them. Nodes have no public addresses; what they download goes through one NAT gateway.
resource "aws_vpc" "main" {
  cidr_block           = "10.40.0.0/16"
  enable_dns_hostnames = true
}

resource "aws_subnet" "private" {
  count             = 2
  vpc_id            = aws_vpc.main.id
  availability_zone = data.aws_availability_zones.available.names[count.index]
  cidr_block        = cidrsubnet(aws_vpc.main.cidr_block, 4, count.index)
}

resource "aws_subnet" "public" {
  vpc_id            = aws_vpc.main.id
  availability_zone = data.aws_availability_zones.available.names[0]
  cidr_block        = cidrsubnet(aws_vpc.main.cidr_block, 4, 8)
}

resource "aws_internet_gateway" "main" {
  vpc_id = aws_vpc.main.id
}

resource "aws_eip" "nat" {
  domain = "vpc"
}

resource "aws_nat_gateway" "main" {
  allocation_id = aws_eip.nat.id
  subnet_id     = aws_subnet.public.id
  depends_on    = [aws_internet_gateway.main]
}

resource "aws_route_table" "public" {
  vpc_id = aws_vpc.main.id
  route {
    cidr_block = "0.0.0.0/0"
    gateway_id = aws_internet_gateway.main.id
  }
}

resource "aws_route_table" "private" {
  vpc_id = aws_vpc.main.id
  route {
    cidr_block     = "0.0.0.0/0"
    nat_gateway_id = aws_nat_gateway.main.id
  }
}

resource "aws_route_table_association" "public" {
  subnet_id      = aws_subnet.public.id
  route_table_id = aws_route_table.public.id
}

resource "aws_route_table_association" "private" {
  count          = 2
  subnet_id      = aws_subnet.private[count.index].id
  route_table_id = aws_route_table.private.id
}

resource "aws_iam_role" "cluster" {
  name = "${var.name}-cluster"
  assume_role_policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [{ Effect = "Allow", Action = "sts:AssumeRole", Principal = { Service = "eks.amazonaws.com" } }]
  })
}

resource "aws_iam_role_policy_attachment" "cluster" {
  role       = aws_iam_role.cluster.name
  policy_arn = "arn:aws:iam::aws:policy/AmazonEKSClusterPolicy"
}

resource "aws_iam_role" "node" {
  name = "${var.name}-node"
  assume_role_policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [{ Effect = "Allow", Action = "sts:AssumeRole", Principal = { Service = "ec2.amazonaws.com" } }]
  })
}

resource "aws_iam_role_policy_attachment" "node" {
  for_each = toset([
    "AmazonEKSWorkerNodePolicy",
    "AmazonEKS_CNI_Policy",
    "AmazonEC2ContainerRegistryReadOnly",
  ])
  role       = aws_iam_role.node.name
  policy_arn = "arn:aws:iam::aws:policy/${each.value}"
}

resource "aws_eks_cluster" "main" {
  name     = var.name
  role_arn = aws_iam_role.cluster.arn
  version  = var.kubernetes_version
  vpc_config {
    subnet_ids              = aws_subnet.private[*].id
    endpoint_private_access = true
    public_access_cidrs     = var.admin_cidrs
  }
  access_config {
    authentication_mode                         = "API"
    bootstrap_cluster_creator_admin_permissions = true
  }
  depends_on = [aws_iam_role_policy_attachment.cluster]
}

# NetworkPolicies are enforced by the VPC CNI once it is told to: without this agents reach everything.
resource "aws_eks_addon" "this" {
  for_each = {
    vpc-cni                = jsonencode({ enableNetworkPolicy = "true" })
    aws-ebs-csi-driver     = null
    eks-pod-identity-agent = null
  }
  cluster_name         = aws_eks_cluster.main.name
  addon_name           = each.key
  configuration_values = each.value
}

resource "aws_eks_node_group" "general" {
  cluster_name    = aws_eks_cluster.main.name
  node_group_name = "general"
  node_role_arn   = aws_iam_role.node.arn
  subnet_ids      = aws_subnet.private[*].id
  instance_types  = [var.general_instance]
  labels          = { pool = "general" }
  scaling_config {
    min_size     = 2
    desired_size = 2
    max_size     = var.general_max
  }
  depends_on = [aws_iam_role_policy_attachment.node]
}

# GPUs cost by the hour whether they compute or not: none, until gpu_nodes says how many. The taint keeps other pods away.
resource "aws_eks_node_group" "gpu" {
  cluster_name    = aws_eks_cluster.main.name
  node_group_name = "gpu"
  node_role_arn   = aws_iam_role.node.arn
  subnet_ids      = [aws_subnet.private[0].id]
  instance_types  = [var.gpu_instance]
  ami_type        = "AL2023_x86_64_NVIDIA"
  disk_size       = 200
  labels          = { pool = "gpu" }
  taint {
    key    = "nvidia.com/gpu"
    value  = "present"
    effect = "NO_SCHEDULE"
  }
  scaling_config {
    min_size     = 0
    desired_size = var.gpu_nodes
    max_size     = max(var.gpu_nodes, 1)
  }
  depends_on = [aws_iam_role_policy_attachment.node]
}

resource "aws_security_group" "database" {
  name   = "${var.name}-database"
  vpc_id = aws_vpc.main.id
  ingress {
    from_port       = 5432
    to_port         = 5432
    protocol        = "tcp"
    security_groups = [aws_eks_cluster.main.vpc_config[0].cluster_security_group_id]
  }
}

resource "aws_db_subnet_group" "main" {
  name       = var.name
  subnet_ids = aws_subnet.private[*].id
}

resource "random_password" "database" {
  length  = 32
  special = false
}

resource "aws_db_instance" "main" {
  identifier                = var.name
  engine                    = "postgres"
  engine_version            = "17"
  instance_class            = var.database_instance
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
  final_snapshot_identifier = "${var.name}-final"
}

resource "aws_s3_bucket" "runs" {
  bucket_prefix = "${var.name}-runs-"
}

resource "aws_s3_bucket_public_access_block" "runs" {
  bucket                  = aws_s3_bucket.runs.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_versioning" "runs" {
  bucket = aws_s3_bucket.runs.id
  versioning_configuration {
    status = "Enabled"
  }
}

# The trainer's pods alone may use the bucket, and no other: no key of AWS is in the cluster.
resource "aws_iam_role" "trainer" {
  name = "${var.name}-trainer"
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
  cluster_name    = aws_eks_cluster.main.name
  namespace       = var.name
  service_account = "agl-trainer"
  role_arn        = aws_iam_role.trainer.arn
}
