//! Rotary position embedding: frequencies by the rules that checkpoints name, and their tables.
use super::config::shown;
use device::{Buf, Ops, View};
use serde_json::{Map, Value};

/// The rule by which positions become angles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rope {
    theta: f64,
    scaling: Scaling,
}

/// How frequencies differ from theta^(-2i/head_dim).
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scaling {
    None,
    /// All are divided by this.
    Linear(f64),
    Llama3(Llama3),
    Yarn(Yarn),
}

/// Llama 3.1: low frequencies are divided, high ones stay, those between are blended.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Llama3 {
    factor: f64,
    low_freq_factor: f64,
    high_freq_factor: f64,
    original_max_position_embeddings: f64,
}

/// YaRN (Peng et al. 2023): pairs that turn seldom within the first training's positions are divided, those that turn often stay,
/// those between are blended, and scores grow by the square of a factor.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Yarn {
    factor: f64,
    /// Turns from which on a pair stays, and up to which it is divided.
    beta_fast: f64,
    beta_slow: f64,
    original_max_position_embeddings: f64,
    /// Factor of q and k.
    attention_factor: f64,
    /// The borders are whole pairs.
    truncate: bool,
}

impl Rope {
    /// Without scaling.
    pub(super) fn plain(theta: f64) -> Self {
        Rope { theta, scaling: Scaling::None }
    }

    /// `value` of `key`: `rope_scaling` or `rope_parameters`; `theta` where it names none.
    pub(super) fn read(key: &str, value: &Value, theta: f64) -> Result<Self, String> {
        let Value::Object(map) = value else {
            return Err(format!("config.json: `{key}` is {}, not a mapping", shown(value)));
        };
        let number = |name: &str| match map.get(name).and_then(Value::as_f64) {
            Some(x) if x > 0.0 && (x as f32).is_finite() => Ok(x),
            _ => Err(format!("config.json: `{key}.{name}` is not a number above 0")),
        };
        let theta = if map.contains_key("rope_theta") { number("rope_theta")? } else { theta };
        // `type` is the older name; files of both times have both
        let named = [map.get("rope_type"), map.get("type")].into_iter().flatten().next();
        let (scaling, known): (Scaling, &[&str]) = match named.and_then(Value::as_str) {
            Some("default") => (Scaling::None, &[]),
            Some("linear") => (Scaling::Linear(number("factor")?), &["factor"]),
            // Up to max_position_embeddings, beyond which no sequence is trained, it changes nothing.
            Some("dynamic") => (number("factor").map(|_| Scaling::None)?, &["factor"]),
            Some("yarn") => (Scaling::Yarn(Yarn::read(key, map, number)?), Yarn::KEYS),
            Some("llama3") => {
                let keys =
                    &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"];
                let rule = Llama3 {
                    factor: number(keys[0])?,
                    low_freq_factor: number(keys[1])?,
                    high_freq_factor: number(keys[2])?,
                    original_max_position_embeddings: number(keys[3])?,
                };
                if rule.high_freq_factor <= rule.low_freq_factor {
                    return Err(format!(
                        "config.json: `{key}.high_freq_factor` is not above `low_freq_factor`"
                    ));
                }
                (Scaling::Llama3(rule), keys)
            }
            _ => {
                let found = named.map_or("none".into(), shown);
                return Err(format!(
                    "config.json: `{key}.rope_type` {found} is not supported; known: default, dynamic, linear, llama3, yarn"
                ));
            }
        };
        let always = ["rope_type", "type", "rope_theta"];
        let whole = |name: &String, v: &Value| name == "partial_rotary_factor" && v.as_f64() == Some(1.0);
        match map.iter().find(|(k, v)| {
            !v.is_null() && !always.contains(&k.as_str()) && !known.contains(&k.as_str()) && !whole(k, v)
        }) {
            Some((k, v)) => Err(format!("config.json: `{key}.{k}: {}` is not supported", shown(v))),
            None => Ok(Rope { theta, scaling }),
        }
    }

    /// Angle per position of pair `i`, in f32 as transformers computes it.
    fn inverse_frequency(&self, i: usize, head_dim: usize) -> f32 {
        let exponent = (2 * i) as f32 / head_dim as f32;
        let inverse = 1.0 / (self.theta as f32).powf(exponent);
        match self.scaling {
            Scaling::None => inverse,
            Scaling::Linear(factor) => inverse / factor as f32,
            Scaling::Llama3(rule) => rule.scale(inverse),
            Scaling::Yarn(rule) => rule.blend(self.theta, i, head_dim),
        }
    }

    /// Factor of cos and sin.
    fn amplitude(&self) -> f32 {
        match self.scaling {
            Scaling::Yarn(rule) => rule.attention_factor as f32,
            Scaling::None | Scaling::Linear(_) | Scaling::Llama3(_) => 1.0,
        }
    }
}

impl Yarn {
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

    /// `number` reads one that must be there.
    fn read(
        key: &str,
        map: &Map<String, Value>,
        number: impl Fn(&str) -> Result<f64, String>,
    ) -> Result<Self, String> {
        let there = |name: &str| map.get(name).is_some_and(|v| !v.is_null());
        let optional = |name: &str| there(name).then(|| number(name)).transpose();
        let factor = number("factor")?;
        let grown = |by: f64| if factor <= 1.0 { 1.0 } else { 0.1 * by * factor.ln() + 1.0 };
        let attention_factor = match (optional("mscale")?, optional("mscale_all_dim")?) {
            (Some(one), Some(all)) => grown(one) / grown(all),
            _ => grown(1.0),
        };
        let truncate = match map.get("truncate") {
            None | Some(Value::Null) => true,
            Some(Value::Bool(yes)) => *yes,
            Some(v) => {
                return Err(format!("config.json: `{key}.truncate` is {}, not true or false", shown(v)));
            }
        };
        Ok(Yarn {
            factor,
            beta_fast: optional("beta_fast")?.unwrap_or(32.0),
            beta_slow: optional("beta_slow")?.unwrap_or(1.0),
            original_max_position_embeddings: number("original_max_position_embeddings")?,
            attention_factor: optional("attention_factor")?.unwrap_or(attention_factor),
            truncate,
        })
    }

    fn blend(&self, theta: f64, i: usize, head_dim: usize) -> f32 {
        let dim = head_dim as f64;
        let pair = |turns: f64| {
            let wavelength = self.original_max_position_embeddings / (turns * std::f64::consts::TAU);
            dim * wavelength.ln() / (2.0 * theta.ln())
        };
        let (low, high) = (pair(self.beta_fast), pair(self.beta_slow));
        let (low, high) = if self.truncate { (low.floor(), high.ceil()) } else { (low, high) };
        let (low, high) = (low.max(0.0), high.min(dim - 1.0));
        let width = if low == high { 0.001 } else { high - low };
        let divided = ((i as f32 - low as f32) / width as f32).clamp(0.0, 1.0);
        let stays = 1.0 - divided;
        let frequency = (theta as f32).powf((2 * i) as f32 / head_dim as f32);
        1.0 / (self.factor as f32 * frequency) * (1.0 - stays) + 1.0 / frequency * stays
    }
}

impl Llama3 {
    fn scale(&self, inverse: f32) -> f32 {
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

/// cos and sin of every position and pair: `[positions, head_dim/2]` each.
pub(super) struct Tables {
    cos: Buf,
    sin: Buf,
    half: usize,
}

impl Tables {
    pub(super) fn new(rope: &Rope, positions: usize, head_dim: usize) -> Self {
        let half = head_dim / 2;
        let (mut cos, mut sin) = (Buf::zeroed(positions * half), Buf::zeroed(positions * half));
        let by = rope.amplitude();
        for i in 0..half {
            let inverse = rope.inverse_frequency(i, head_dim);
            for pos in 0..positions {
                let angle = f64::from(pos as f32 * inverse);
                cos.host_mut()[pos * half + i] = angle.cos() as f32 * by;
                sin.host_mut()[pos * half + i] = angle.sin() as f32 * by;
            }
        }
        Tables { cos, sin, half }
    }

    /// Moves them to where ops compute.
    pub(super) fn place(&mut self, ops: &dyn Ops) {
        if !ops.is_host() {
            (self.cos, self.sin) = (ops.device_copy(self.cos.view()), ops.device_copy(self.sin.view()));
        }
    }

    /// Those of the first `t` positions.
    pub(super) fn first(&self, t: usize) -> (View<'_>, View<'_>) {
        let n = t * self.half;
        (self.cos.view().slice(0..n), self.sin.view().slice(0..n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_not_known_is_refused_by_name() {
        let why = |v: Value| Rope::read("rope_scaling", &v, 1e4).unwrap_err();
        assert!(why(json!({"rope_type": "longrope"})).contains("\"longrope\" is not supported"));
        assert!(why(json!({"factor": 2.0})).contains("none is not supported"));
        assert!(why(json!({"type": "linear"})).contains("`rope_scaling.factor` is not a number"));
        assert!(why(json!({"type": "linear", "factor": 2, "beta": 1})).contains("`rope_scaling.beta: 1`"));
        assert!(why(json!({"type": "linear", "factor": "1e99"})).contains("factor"));
        assert!(
            why(json!({"rope_type": "default", "partial_rotary_factor": 0.5})).contains("partial_rotary")
        );
        assert!(why(json!([])).contains("not a mapping"));
        let yarn = |more: Value| {
            let mut v = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32});
            v.as_object_mut().expect("a map").extend(more.as_object().expect("a map").clone());
            v
        };
        assert!(
            why(yarn(json!({"original_max_position_embeddings": null}))).contains("original_max_position")
        );
        assert!(why(yarn(json!({"truncate": 1}))).contains("truncate` is 1"));
        assert!(why(yarn(json!({"beta_fast": 0}))).contains("beta_fast"));
        assert!(why(yarn(json!({"finetuned": true}))).contains("`rope_scaling.finetuned: true`"));
    }

    /// Within the positions of the first training.
    #[test]
    fn dynamic_scaling_is_none() {
        let read = |v: Value| Rope::read("rope_scaling", &v, 1e4).expect("known");
        assert_eq!(read(json!({"type": "dynamic", "factor": 2.0})), Rope::plain(1e4));
    }
}
