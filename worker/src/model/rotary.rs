//! Rotary position embedding: frequencies by the rules that checkpoints name, and their tables.
use super::config::shown;
use device::{Buf, Ops, View};
use serde_json::Value;

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
}

/// Llama 3.1: low frequencies are divided, high ones stay, those between are blended.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Llama3 {
    factor: f64,
    low_freq_factor: f64,
    high_freq_factor: f64,
    original_max_position_embeddings: f64,
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
                    "config.json: `{key}.rope_type` {found} is not supported; known: default, linear, llama3"
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
        }
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
        for i in 0..half {
            let inverse = rope.inverse_frequency(i, head_dim);
            for pos in 0..positions {
                let angle = f64::from(pos as f32 * inverse);
                cos.host_mut()[pos * half + i] = angle.cos() as f32;
                sin.host_mut()[pos * half + i] = angle.sin() as f32;
            }
        }
        Tables { cos, sin, half }
    }

    /// Moves them to where ops compute.
    pub(super) fn place(&mut self, ops: &dyn Ops) {
        if !ops.is_host() {
            (self.cos, self.sin) = (ops.copied(self.cos.view()), ops.copied(self.sin.view()));
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
    }
}
