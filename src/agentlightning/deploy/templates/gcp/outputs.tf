output "kubeconfig" {
  value = "gcloud container clusters get-credentials ${google_container_cluster.main.name} --zone ${var.zone} --project ${var.project}"
}

output "store_url" {
  description = "For the Secret that values.yaml names as store."
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
