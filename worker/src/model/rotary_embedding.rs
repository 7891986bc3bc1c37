//! Rotary position embedding (RoPE, Su and others, 2021): its configuration, its frequencies, and
//! its tables of cos and sin. [`RopeConfig`] describes the frequencies, scaled as by
//! `ROPE_INIT_FUNCTIONS` of transformers. [`RopeTables`] are the tables of cos and sin.
use super::{
    error::{ModelError, Result},
    hf_config::{HfConfigFields, format_shortened_value, invalid_value_error, shorten_text},
};
use device::{Buf, Ops, View};
use serde_json::{Map, Value};
use std::sync::OnceLock;

/// The frequencies of a rotary embedding: the base `theta`, and how they are scaled for longer
/// sequences.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RopeConfig {
    theta: f64,
    scaling: RopeScaling,
}

/// How the frequencies theta^(-2i/head_dim) of a rotary embedding are scaled for longer sequences.
#[derive(Clone, Copy, Debug, PartialEq)]
enum RopeScaling {
    None,
    /// Position interpolation (Chen et al. 2023): every frequency is divided by this factor.
    Linear(f64),
    Llama3(Llama3Scaling),
    Yarn(YarnScaling),
}

/// The scaling of frequencies in Llama 3.1 (`_compute_llama3_parameters` of transformers).
#[derive(Clone, Copy, Debug, PartialEq)]
struct Llama3Scaling {
    factor: f64,
    low_freq_factor: f64,
    high_freq_factor: f64,
    original_max_position_embeddings: f64,
}

/// The scaling of frequencies by YaRN (Peng and others, 2023; `_compute_yarn_parameters` of
/// transformers). Attention scores grow by `attention_factor²`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct YarnScaling {
    factor: f64,
    /// A frequency with at least this many turns within the original positions is unchanged.
    beta_fast: f64,
    /// A frequency with at most this many turns within the original positions is divided by
    /// `factor`.
    beta_slow: f64,
    original_max_position_embeddings: f64,
    /// The factor by which cos and sin are multiplied.
    attention_factor: f64,
    /// Whether the two ends of the range of interpolated frequencies are rounded to integer
    /// indices.
    truncate: bool,
}

impl RopeConfig {
    /// Creates the config of a rotary position embedding with base `theta` and without scaling of
    /// the frequencies.
    pub(super) fn unscaled(theta: f64) -> Self {
        RopeConfig { theta, scaling: RopeScaling::None }
    }

    /// Reads the config of the rotary position embedding from config.json: from `rope_parameters`
    /// (transformers 5), or from `rope_theta` and `rope_scaling` (transformers 4).
    pub(super) fn from_fields(fields: &HfConfigFields) -> Result<Self> {
        let theta = fields.read_positive_number("rope_theta", 10000.0)?;
        let (old, new) = (fields.read_value("rope_scaling"), fields.read_value("rope_parameters"));
        match (old, new) {
            (Some(a), Some(b)) if a != b => {
                Err(ModelError::KeysContradict { key: "rope_scaling", other: "rope_parameters" })
            }
            (None, None) => Ok(RopeConfig::unscaled(theta)),
            (_, Some(v)) => RopeConfig::parse_config_value("rope_parameters", v, theta),
            (Some(v), None) => RopeConfig::parse_config_value("rope_scaling", v, theta),
        }
    }

    /// Reads the config of a rotary embedding from `value`, the value of the key `key` of
    /// config.json, which is `rope_scaling` or `rope_parameters`. `theta` is the default of
    /// `rope_theta`.
    pub(super) fn parse_config_value(key: &str, value: &Value, theta: f64) -> Result<Self> {
        const COMMON_KEYS: [&str; 3] = ["rope_type", "type", "rope_theta"];
        const ROPE_TYPES: [&str; 5] = ["default", "dynamic", "linear", "llama3", "yarn"];
        let Value::Object(map) = value else { return Err(invalid_value_error(key, value, "a mapping")) };
        let number = |name: &str| match map.get(name).and_then(Value::as_f64) {
            Some(x) if x > 0.0 && (x as f32).is_finite() => Ok(x),
            _ => {
                let value = map.get(name).unwrap_or(&Value::Null);
                Err(invalid_value_error(format!("{key}.{name}"), value, "a number above 0"))
            }
        };
        let theta = if map.contains_key("rope_theta") { number("rope_theta")? } else { theta };
        // `type` is the older name of `rope_type`; some files have both.
        let rope_type = [map.get("rope_type"), map.get("type")].into_iter().flatten().next();
        let (scaling, type_keys): (RopeScaling, &[&str]) = match rope_type.and_then(Value::as_str) {
            Some("default") => (RopeScaling::None, &[]),
            Some("linear") => (RopeScaling::Linear(number("factor")?), &["factor"]),
            // Dynamic scaling changes only sequences longer than max_position_embeddings, which are
            // not trained.
            Some("dynamic") => (number("factor").map(|_| RopeScaling::None)?, &["factor"]),
            Some("yarn") => {
                (RopeScaling::Yarn(YarnScaling::parse_config_map(key, map, number)?), YarnScaling::KEYS)
            }
            Some("llama3") => {
                (RopeScaling::Llama3(Llama3Scaling::parse_config_map(key, map, number)?), Llama3Scaling::KEYS)
            }
            _ => {
                return Err(ModelError::ValueUnsupported {
                    key: format!("{key}.rope_type"),
                    value: format_shortened_value(rope_type.unwrap_or(&Value::Null)),
                    supported: ROPE_TYPES.map(String::from).to_vec(),
                });
            }
        };
        let is_full_rotation =
            |name: &str, v: &Value| name == "partial_rotary_factor" && v.as_f64() == Some(1.0);
        let is_known = |name: &str| COMMON_KEYS.contains(&name) || type_keys.contains(&name);
        match map.iter().find(|(k, v)| !v.is_null() && !is_known(k) && !is_full_rotation(k, v)) {
            Some((k, v)) => Err(ModelError::ValueUnsupported {
                key: format!("{key}.{}", shorten_text(k)),
                value: format_shortened_value(v),
                supported: Vec::new(),
            }),
            None => Ok(RopeConfig { theta, scaling }),
        }
    }

    /// Computes by how many radians per position rotary embedding rotates pair number `i` of the
    /// elements of an attention head. Computes in f32, as transformers does.
    fn compute_frequency(&self, i: usize, head_dim: usize) -> f32 {
        let exponent = (2 * i) as f32 / head_dim as f32;
        let inverse = 1.0 / (self.theta as f32).powf(exponent);
        match self.scaling {
            RopeScaling::None => inverse,
            RopeScaling::Linear(factor) => inverse / factor as f32,
            RopeScaling::Llama3(rule) => rule.scale_frequency(inverse),
            RopeScaling::Yarn(rule) => rule.compute_frequency(self.theta, i, head_dim),
        }
    }

    /// Returns the factor by which the tables of cos and sin are multiplied, which is YaRN's
    /// attention factor, or 1 without YaRN.
    fn cos_sin_factor(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn(rule) => rule.attention_factor as f32,
            RopeScaling::None | RopeScaling::Linear(_) | RopeScaling::Llama3(_) => 1.0,
        }
    }
}

impl YarnScaling {
    /// The keys in config.json from which the YaRN scaling is read.
    const KEYS: &[&str] = &[
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ];

    /// Reads the YaRN scaling from `map`, the value of the key `key` of config.json. `number`
    /// returns the number at a key of `map`, and fails if the key is absent.
    fn parse_config_map(
        key: &str,
        map: &Map<String, Value>,
        number: impl Fn(&str) -> Result<f64>,
    ) -> Result<Self> {
        let is_set = |name: &str| map.get(name).is_some_and(|v| !v.is_null());
        let optional = |name: &str| is_set(name).then(|| number(name)).transpose();
        let factor = number("factor")?;
        let mscale = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
        let attention_factor = match (optional("mscale")?, optional("mscale_all_dim")?) {
            (Some(scale), Some(scale_all)) => mscale(scale) / mscale(scale_all),
            _ => mscale(1.0),
        };
        let truncate = match map.get("truncate") {
            None | Some(Value::Null) => true,
            Some(Value::Bool(truncate)) => *truncate,
            Some(v) => return Err(invalid_value_error(format!("{key}.truncate"), v, "true or false")),
        };
        Ok(YarnScaling {
            factor,
            beta_fast: optional("beta_fast")?.unwrap_or(32.0),
            beta_slow: optional("beta_slow")?.unwrap_or(1.0),
            original_max_position_embeddings: number("original_max_position_embeddings")?,
            attention_factor: optional("attention_factor")?.unwrap_or(attention_factor),
            truncate,
        })
    }

    /// Computes the frequency, in radians per position, with which rotary embedding with YaRN
    /// rotates the `i`-th pair of elements of a head.
    fn compute_frequency(&self, theta: f64, i: usize, head_dim: usize) -> f32 {
        let dim = head_dim as f64;
        let pair_with_turns = |turns: f64| {
            let wavelength = self.original_max_position_embeddings / (turns * std::f64::consts::TAU);
            dim * wavelength.ln() / (2.0 * theta.ln())
        };
        let (low, high) = (pair_with_turns(self.beta_fast), pair_with_turns(self.beta_slow));
        let (low, high) = if self.truncate { (low.floor(), high.ceil()) } else { (low, high) };
        let (low, high) = (low.max(0.0), high.min(dim - 1.0));
        let width = if low == high { 0.001 } else { high - low };
        let divided_share = ((i as f32 - low as f32) / width as f32).clamp(0.0, 1.0);
        let unchanged_share = 1.0 - divided_share;
        let frequency = (theta as f32).powf((2 * i) as f32 / head_dim as f32);
        1.0 / (self.factor as f32 * frequency) * (1.0 - unchanged_share) + 1.0 / frequency * unchanged_share
    }
}

impl Llama3Scaling {
    /// The keys in config.json from which the Llama 3 scaling is read.
    const KEYS: &[&str] =
        &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"];

    /// Reads the Llama 3 scaling from `map`, the value of the key `key` of config.json. `number`
    /// returns the number at a key of `map`, and fails if the key is absent.
    fn parse_config_map(
        key: &str,
        map: &Map<String, Value>,
        number: impl Fn(&str) -> Result<f64>,
    ) -> Result<Self> {
        let rule = Llama3Scaling {
            factor: number("factor")?,
            low_freq_factor: number("low_freq_factor")?,
            high_freq_factor: number("high_freq_factor")?,
            original_max_position_embeddings: number("original_max_position_embeddings")?,
        };
        if rule.high_freq_factor <= rule.low_freq_factor {
            let value = map.get("high_freq_factor").unwrap_or(&Value::Null);
            let expected = format!("a number above low_freq_factor ({})", rule.low_freq_factor);
            return Err(invalid_value_error(format!("{key}.high_freq_factor"), value, expected));
        }
        Ok(rule)
    }

    /// Returns the rotation frequency `inverse` (radians per position) after Llama 3.1's scaling,
    /// which lowers low frequencies for longer sequences.
    fn scale_frequency(&self, inverse: f32) -> f32 {
        let (low, high, old) =
            (self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings);
        let (longest, shortest) = ((old / low) as f32, (old / high) as f32);
        let factor = self.factor as f32;
        let wavelength = std::f32::consts::TAU / inverse;
        if wavelength > longest {
            return inverse / factor;
        }
        if wavelength < shortest {
            return inverse;
        }
        let smooth = (old as f32 / wavelength - low as f32) / (high - low) as f32;
        (1.0 - smooth) * inverse / factor + smooth * inverse
    }
}

/// Tables of cos and sin for rotary embedding, for every position and pair of elements of a head,
/// `[positions, head_dim/2]` each. They are computed before their first use, because a model whose
/// memory is only estimated needs none.
pub(super) struct RopeTables {
    rope: RopeConfig,
    positions: usize,
    head_dim: usize,
    cos_and_sin: OnceLock<(Buf, Buf)>,
}

impl RopeTables {
    /// Creates the tables of cos and sin of the rotary embedding `rope` for positions below
    /// `positions`, without computing them.
    pub(super) fn new(rope: RopeConfig, positions: usize, head_dim: usize) -> Self {
        RopeTables { rope, positions, head_dim, cos_and_sin: OnceLock::new() }
    }

    /// Computes the tables of cos and sin in host memory.
    fn compute(&self) -> (Buf, Buf) {
        let half_head_dim = self.head_dim / 2;
        let len = self.positions * half_head_dim;
        let (mut cos, mut sin) = (Buf::zeroed(len), Buf::zeroed(len));
        let factor = self.rope.cos_sin_factor();
        for i in 0..half_head_dim {
            let inverse = self.rope.compute_frequency(i, self.head_dim);
            for pos in 0..self.positions {
                let angle = f64::from(pos as f32 * inverse);
                cos.host_slice_mut()[pos * half_head_dim + i] = angle.cos() as f32 * factor;
                sin.host_slice_mut()[pos * half_head_dim + i] = angle.sin() as f32 * factor;
            }
        }
        (cos, sin)
    }

    /// Moves the tables of cos and sin to the device of `ops`. Does nothing if the device is the
    /// host.
    pub(super) fn move_to_device(&mut self, ops: &dyn Ops) {
        if !ops.is_host() {
            let (cos, sin) = self.compute();
            let on_device = (ops.clone_to_device(cos.view()), ops.clone_to_device(sin.view()));
            self.cos_and_sin = OnceLock::from(on_device);
        }
    }

    /// Returns the tables of cos and sin for the first `t` positions, `[t, head_dim/2]` each.
    pub(super) fn slice_first_positions(&self, t: usize) -> (View<'_>, View<'_>) {
        let n = t * (self.head_dim / 2);
        let (cos, sin) = self.cos_and_sin.get_or_init(|| self.compute());
        (cos.view().slice(0..n), sin.view().slice(0..n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_unsupported_or_invalid_scaling_is_rejected_by_key() {
        let invalid = |v: Value| match RopeConfig::parse_config_value("rope_scaling", &v, 1e4) {
            Err(ModelError::ValueInvalid { key, .. }) => key,
            result => panic!("{v}: {result:?}"),
        };
        let unsupported = |v: Value| match RopeConfig::parse_config_value("rope_scaling", &v, 1e4) {
            Err(ModelError::ValueUnsupported { key, value, .. }) => (key, value),
            result => panic!("{v}: {result:?}"),
        };
        let entry = |key: &str, value: &str| (format!("rope_scaling.{key}"), value.to_owned());
        assert_eq!(unsupported(json!({"rope_type": "longrope"})), entry("rope_type", "\"longrope\""));
        assert_eq!(unsupported(json!({"factor": 2.0})), entry("rope_type", "null"));
        assert_eq!(invalid(json!({"type": "linear"})), "rope_scaling.factor");
        assert_eq!(unsupported(json!({"type": "linear", "factor": 2, "beta": 1})), entry("beta", "1"));
        assert_eq!(invalid(json!({"type": "linear", "factor": "1e99"})), "rope_scaling.factor");
        assert_eq!(
            unsupported(json!({"rope_type": "default", "partial_rotary_factor": 0.5})),
            entry("partial_rotary_factor", "0.5")
        );
        assert_eq!(invalid(json!([])), "rope_scaling");
        let yarn = |more: Value| {
            let mut v = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32});
            v.as_object_mut().expect("a map").extend(more.as_object().expect("a map").clone());
            v
        };
        assert_eq!(
            invalid(yarn(json!({"original_max_position_embeddings": null}))),
            "rope_scaling.original_max_position_embeddings"
        );
        assert_eq!(invalid(yarn(json!({"truncate": 1}))), "rope_scaling.truncate");
        assert_eq!(invalid(yarn(json!({"beta_fast": 0}))), "rope_scaling.beta_fast");
        assert_eq!(unsupported(yarn(json!({"finetuned": true}))), entry("finetuned", "true"));
    }

    /// Checks that dynamic scaling changes nothing, because it affects only sequences longer than
    /// `max_position_embeddings`, which are not trained.
    #[test]
    fn dynamic_scaling_equals_no_scaling() {
        let read =
            |v: Value| RopeConfig::parse_config_value("rope_scaling", &v, 1e4).expect("a supported type");
        assert_eq!(read(json!({"type": "dynamic", "factor": 2.0})), RopeConfig::unscaled(1e4));
    }
}
