//! Defines [`RunRecorder`], which sends the parameters, metrics and tags of a run from the files of
//! the run directory to MLflow.
use super::{
    batch::{Batch, format_params, format_tags, to_milliseconds},
    journal_reader::JournalReader,
    rest_client::{RequestError, RestClient},
    settings::MlflowSettings,
    stored_run::StoredMlflowRun,
};
use crate::{
    clock::read_unix_time,
    runs::{JOURNAL_FILE, read_private_file},
    usage_metrics::UsageMetricsSchedule,
};
use protocol::{
    event::TimedEvent,
    run_measurements::{RunMeasurements, STATUS_FILE, STATUS_VERSION},
};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

/// The largest age, in seconds, at which measurements of the hosts' resource usage are still sent
/// to MLflow.
const MAX_STATUS_AGE_S: f64 = 60.0;
/// The largest size of the run's status file, which contains the newest measurements, in bytes.
const MAX_STATUS_BYTES: u64 = 8 << 20;

/// The data about a run of launch that MLflow gets at the start of the recording, such as its ID,
/// hosts and parameters.
#[derive(Clone, Debug)]
pub(crate) struct RecordedRun {
    /// The ID of the run.
    pub(crate) run: String,
    pub(crate) run_dir: PathBuf,
    /// The name of the job.
    pub(crate) job_name: String,
    /// The number of workers.
    pub(crate) world: u32,
    /// The names of the hosts.
    pub(crate) hosts: Vec<String>,
    /// The values of the job's keys, without secrets.
    pub(crate) params: BTreeMap<String, String>,
    /// The time at which the run began, in seconds since 1970.
    pub(crate) began_at: f64,
    /// Whether a lost controller has begun to record the run.
    pub(crate) is_taken_over: bool,
}

/// The reason why data of a run were not sent to MLflow: the server or a file is unavailable, or
/// the server rejects the run.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum RecordError {
    /// The server or a file is not available, and may be later. Contains the reason.
    Unavailable(String),
    /// MLflow will not record this run. Contains the reason.
    Final(String),
}

/// What one call of [`RunRecorder::send_next`] has done: created the MLflow run, sent data, left
/// out rejected data, or found nothing to send.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum SendProgress {
    /// The run of MLflow exists from now on. Contains the address of its page.
    Created(String),
    /// A part was sent, and there may be more.
    Sent,
    /// MLflow has rejected a part, which is left out. Contains the reason.
    LeftOut(String),
    /// Everything so far was sent.
    UpToDate,
    /// Everything was sent, and the run has ended.
    Complete,
}

/// Sends the data of a run, such as parameters, events and resource usage, to MLflow in a sequence
/// of requests. Blocks for as long as the server needs.
pub(super) struct RunRecorder {
    settings: MlflowSettings,
    run: RecordedRun,
    journal: JournalReader,
    /// The client and the run of MLflow, once they exist.
    target: Option<(RestClient, StoredMlflowRun)>,
    usage: UsageMetricsSchedule,
}

impl From<RequestError> for RecordError {
    fn from(error: RequestError) -> RecordError {
        match error {
            RequestError::Unavailable(reason) => RecordError::Unavailable(reason),
            RequestError::Rejected { code, message } => RecordError::Final(format!("{code}: {message}")),
        }
    }
}

/// Converts a read error of a file in the run directory to [`RecordError::Unavailable`], which
/// makes the recorder try again later.
fn to_unavailable_file_error(error: io::Error) -> RecordError {
    RecordError::Unavailable(format!("a file of the run directory: {error}"))
}

impl RunRecorder {
    /// Creates a recorder that can send the data of the run `run` to the MLflow server in
    /// `settings`. Sends nothing.
    pub(super) fn new(settings: MlflowSettings, run: RecordedRun) -> RunRecorder {
        let journal = JournalReader::new(run.run_dir.join(JOURNAL_FILE));
        RunRecorder { settings, run, journal, target: None, usage: UsageMetricsSchedule::new() }
    }

    /// Takes the next step to record this run with MLflow: creates the MLflow run, or sends
    /// parameters, events or the usage of hosts. After an error, the next call repeats the part.
    pub(super) fn send_next(&mut self) -> Result<SendProgress, RecordError> {
        let Some((client, stored)) = &mut self.target else {
            let target = self.open_mlflow_run()?;
            let address = target.1.page_address();
            self.target = Some(target);
            return Ok(SendProgress::Created(address));
        };
        if !stored.has_params {
            let mut rejected = None;
            for request in format_params(&stored.run_id, &self.run.params) {
                rejected = send_part(client, &request)?.or(rejected);
            }
            stored.has_params = true;
            stored.write_position(&self.run.run_dir).map_err(to_unavailable_file_error)?;
            return Ok(rejected.map_or(SendProgress::Sent, SendProgress::LeftOut));
        }
        let mut batch = Batch::default();
        let position = self.journal.read_lines(stored.position, &mut |line| {
            if let Ok(timed) = TimedEvent::from_json(line) {
                batch.add_event(&timed);
            }
            !batch.is_full() && batch.end.is_none()
        });
        let position = position.map_err(to_unavailable_file_error)?;
        if self.usage.is_due()
            && let Some(status) = read_status(&self.run.run_dir)
            && let Some(metrics) = self.usage.list_due_metrics(&status)
        {
            let mut usage = Batch::default();
            usage.add_metrics_at_seconds(metrics, status.time, (status.time - self.run.began_at).max(0.0));
            if let Some(reason) = send_part(client, &usage.to_request(&stored.run_id))? {
                return Ok(SendProgress::LeftOut(reason));
            }
        }
        if position == stored.position {
            return Ok(SendProgress::UpToDate);
        }
        let rejected = match batch.has_content() {
            true => send_part(client, &batch.to_request(&stored.run_id))?,
            false => None,
        };
        if let Some((state, time)) = batch.end {
            update_mlflow_run_state(client, &stored.run_id, state, Some(time))?;
        }
        stored.position = position;
        stored.write_position(&self.run.run_dir).map_err(to_unavailable_file_error)?;
        Ok(match (rejected, batch.end) {
            (Some(reason), _) => SendProgress::LeftOut(reason),
            (None, Some(_)) => SendProgress::Complete,
            (None, None) => SendProgress::Sent,
        })
    }

    /// Connects to the MLflow server, and creates an MLflow run for this run or continues the
    /// MLflow run of the lost controller.
    fn open_mlflow_run(&self) -> Result<(RestClient, StoredMlflowRun), RecordError> {
        let stored = match self.run.is_taken_over {
            true => StoredMlflowRun::read(&self.run.run_dir).map_err(to_unavailable_file_error)?,
            false => None,
        };
        let uri = stored.as_ref().map_or(&self.settings.uri, |stored| &stored.uri).clone();
        let client = RestClient::new(&uri, &self.settings).map_err(|error| {
            let file = self.settings.certificates.clone().unwrap_or_default();
            RecordError::Unavailable(format!("the certificates in {}: {error}", file.display()))
        })?;
        if let Some(mut stored) = stored {
            update_mlflow_run_state(&client, &stored.run_id, "RUNNING", None)?;
            stored.position =
                self.journal.resolve_position(stored.position).map_err(to_unavailable_file_error)?;
            return Ok((client, stored));
        }
        let experiment = self.find_or_create_experiment(&client)?;
        // The lost controller may have created the run without storing its ID.
        let existing = match self.run.is_taken_over {
            true => self.find_mlflow_run(&client, &experiment)?,
            false => None,
        };
        let run_id = match existing {
            Some(run_id) => run_id,
            None => self.create_mlflow_run(&client, &experiment)?,
        };
        let stored = StoredMlflowRun::new(&uri, &experiment, &run_id);
        stored.write(&self.run.run_dir).map_err(to_unavailable_file_error)?;
        Ok((client, stored))
    }

    /// Returns the ID of the MLflow experiment to which the run belongs, and creates the experiment
    /// on the server if it does not exist.
    fn find_or_create_experiment(&self, client: &RestClient) -> Result<String, RecordError> {
        let name = &self.settings.experiment;
        let find = || client.get("experiments/get-by-name", ("experiment_name", name));
        let found = match find() {
            Err(RequestError::Rejected { code, .. }) if code == "RESOURCE_DOES_NOT_EXIST" => {
                match client.post("experiments/create", &json!({"name": name})) {
                    // Another run has created the experiment in the meantime.
                    Err(RequestError::Rejected { code, .. }) if code == "RESOURCE_ALREADY_EXISTS" => find()?,
                    created => created?,
                }
            }
            found => found?,
        };
        read_experiment_id(&found)
    }

    /// Creates a run on the MLflow server for the data of this run of launch, with tags such as the
    /// run ID and the hosts. Returns its ID.
    fn create_mlflow_run(&self, client: &RestClient, experiment: &str) -> Result<String, RecordError> {
        let user = nix::unistd::User::from_uid(nix::unistd::getuid()).ok().flatten();
        let user = user.map(|user| user.name).unwrap_or_default();
        let tags = BTreeMap::from([
            ("launch.run".to_owned(), self.run.run.clone()),
            ("launch.run_dir".to_owned(), self.run.run_dir.display().to_string()),
            ("launch.job".to_owned(), self.run.job_name.clone()),
            ("launch.world".to_owned(), self.run.world.to_string()),
            ("launch.hosts".to_owned(), self.run.hosts.join(", ")),
            ("mlflow.user".to_owned(), user),
            ("mlflow.source.name".to_owned(), self.run.job_name.clone()),
            ("mlflow.source.type".to_owned(), "JOB".to_owned()),
        ]);
        let created = client.post(
            "runs/create",
            &json!({
                "experiment_id": experiment,
                "run_name": self.settings.run_name.as_ref().unwrap_or(&self.run.run),
                "start_time": to_milliseconds(self.run.began_at),
                "tags": format_tags(&tags),
            }),
        )?;
        read_created_run_id(&created)
    }

    /// Finds the run on the MLflow server that was created earlier for this job's run, by its tag
    /// `launch.run`. Returns its ID, or `None` if there is none.
    fn find_mlflow_run(&self, client: &RestClient, experiment: &str) -> Result<Option<String>, RecordError> {
        let filter = format!("tags.`launch.run` = '{}'", self.run.run.replace('\'', ""));
        let request = json!({"experiment_ids": [experiment], "filter": filter, "max_results": 1});
        let runs = client.post("runs/search", &request)?;
        read_found_run_id(&runs)
    }
}

/// Sends parameters, metrics or tags, formatted as the body of one request, to the MLflow server.
/// Returns the reason if MLflow rejects only this part.
fn send_part(client: &RestClient, request: &Value) -> Result<Option<String>, RecordError> {
    match client.post("runs/log-batch", request) {
        Err(RequestError::Rejected { code, message })
            if !["RESOURCE_DOES_NOT_EXIST", "INVALID_STATE", "PERMISSION_DENIED"]
                .contains(&code.as_str()) =>
        {
            Ok(Some(format!("{code}: {message}")))
        }
        Err(error) => Err(error.into()),
        Ok(_) => Ok(None),
    }
}

/// Sets the state (such as `FINISHED`) and the end time of a run on the MLflow server.
fn update_mlflow_run_state(
    client: &RestClient,
    run: &str,
    state: &str,
    end: Option<u64>,
) -> Result<(), RecordError> {
    let mut request = json!({"run_id": run, "status": state});
    if let Some(end) = end {
        request["end_time"] = end.into();
    }
    client.post("runs/update", &request)?;
    Ok(())
}

/// Returns the ID of the experiment that the MLflow server has found or created.
pub(super) fn read_experiment_id(answer: &Value) -> Result<String, RecordError> {
    let id = answer["experiment_id"].as_str().or(answer["experiment"]["experiment_id"].as_str());
    check_mlflow_id(id, "experiment")
}

/// Returns the ID of the run that the MLflow server has created.
pub(super) fn read_created_run_id(answer: &Value) -> Result<String, RecordError> {
    check_mlflow_id(answer["run"]["info"]["run_id"].as_str(), "run")
}

/// Returns the ID of the run that the MLflow server has found, or `None` if it has found none.
pub(super) fn read_found_run_id(answer: &Value) -> Result<Option<String>, RecordError> {
    match answer["runs"][0]["info"]["run_id"].as_str() {
        Some(id) => check_mlflow_id(Some(id), "run").map(Some),
        None => Ok(None),
    }
}

/// Returns the ID of a run or an experiment from an answer of the MLflow server, after checking its
/// length and its characters. IDs are parts of addresses that are shown.
fn check_mlflow_id(id: Option<&str>, kind: &str) -> Result<String, RecordError> {
    let is_id =
        |id: &&str| (1..=64).contains(&id.len()) && id.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    let missing = || RecordError::Unavailable(format!("its answer has no ID of the {kind}"));
    id.filter(is_id).map(str::to_owned).ok_or_else(missing)
}

/// Reads the newest measurements of the hosts' resource usage from the run's status file. Returns
/// `None` if there are none, or if they are too old.
fn read_status(run_dir: &Path) -> Option<RunMeasurements> {
    let bytes = read_private_file(&run_dir.join(STATUS_FILE), MAX_STATUS_BYTES).ok()?;
    let status: RunMeasurements = serde_json::from_slice(&bytes).ok()?;
    let is_recent = read_unix_time() - status.time < MAX_STATUS_AGE_S;
    (status.version == STATUS_VERSION && is_recent).then_some(status)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_the_server_are_checked() {
        let answer = |id: &str| {
            json!({
                "experiment_id": id,
                "run": {"info": {"run_id": id}},
                "runs": [{"info": {"run_id": id}}],
            })
        };
        let good = answer("0f3c-1");
        assert_eq!(read_experiment_id(&good), Ok("0f3c-1".into()));
        assert_eq!(read_created_run_id(&good), Ok("0f3c-1".into()));
        assert_eq!(read_found_run_id(&good), Ok(Some("0f3c-1".into())));
        assert_eq!(read_found_run_id(&json!({"runs": []})), Ok(None));
        for bad in ["", "a/../b", &"x".repeat(65)] {
            let bad = answer(bad);
            assert!(read_experiment_id(&bad).is_err());
            assert!(read_created_run_id(&bad).is_err());
            assert!(read_found_run_id(&bad).is_err());
        }
    }
}
