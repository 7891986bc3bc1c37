//! Codes of errors about job.yaml and --set.

codes! {
    JOB_INVALID: Job = "job-invalid" {
        summary: "The job file contains several mistakes; each is reported with its own code.",
        cause: "Keys or values of the job file are not valid. Nothing was started.",
        remedy: "Correct the mistakes that are listed above the summary.",
    }
}
