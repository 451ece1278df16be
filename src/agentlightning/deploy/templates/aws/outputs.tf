output "kubeconfig" {
  value = "aws eks update-kubeconfig --region ${var.region} --name ${aws_eks_cluster.main.name}"
}

output "store_url" {
  description = "For the Secret that values.yaml names as store."
  value       = "postgresql://agl:${random_password.database.result}@${aws_db_instance.main.endpoint}/agl?sslmode=require"
  sensitive   = true
}

output "checkpoint_url" {
  description = "For trainer.checkpoint_url of the configuration."
  value       = "s3://${aws_s3_bucket.runs.bucket}/runs"
}
