//! Samples, and rows of the printed table.

use std::{fmt::Write as _, time::Duration};

#[derive(Debug, Default)]
pub(crate) struct Samples(Vec<Duration>);

impl Samples {
    pub(crate) const fn new() -> Self {
        Self(Vec::new())
    }

    pub(crate) fn add(&mut self, sample: Duration) {
        self.0.push(sample);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The sample at this part of the sorted whole, in microseconds.
    fn at(&self, part: f64) -> Option<f64> {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "an index into a few hundred samples"
        )]
        let index = ((sorted.len() as f64 - 1.0) * part).round().max(0.0) as usize;
        sorted.get(index).map(|sample| sample.as_secs_f64() * 1e6)
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Target {
    AtMost(f64),
    AtLeast(f64),
    None,
}

#[derive(Debug)]
pub(crate) struct Row {
    name: String,
    measured: String,
    value: Option<f64>,
    unit: &'static str,
    target: Target,
}

impl Row {
    pub(crate) fn floor(samples: &Samples) -> Self {
        Self {
            name: "floor: fork+exec /bin/true".into(),
            measured: times(samples),
            value: Some(1.0),
            unit: "x",
            target: Target::None,
        }
    }

    pub(crate) fn ratio(name: &str, samples: &Samples, floor: &Samples, target: Target) -> Self {
        let value = samples.at(0.5).zip(floor.at(0.5)).map(|(value, floor)| value / floor);
        Self { name: name.into(), measured: times(samples), value, unit: "x", target }
    }

    /// How much longer one takes than the other.
    pub(crate) fn distance(
        name: &str,
        longer: &Samples,
        than: &Samples,
        floor: &Samples,
        target: Target,
    ) -> Self {
        let medians = longer.at(0.5).zip(than.at(0.5)).zip(floor.at(0.5));
        let value = medians.map(|((longer, than), floor)| (longer - than) / floor);
        Self { name: name.into(), measured: "distance of the medians".into(), value, unit: "x", target }
    }

    pub(crate) fn rate(name: &str, bytes: u64, time: Duration, target: Target) -> Self {
        let rate = bytes as f64 / 1e6 / time.as_secs_f64();
        Self {
            name: name.into(),
            measured: format!("{:.0} MB", bytes as f64 / 1e6),
            value: Some(rate),
            unit: " MB/s",
            target,
        }
    }

    pub(crate) fn per_second(name: &str, count: usize, time: Duration, target: Target) -> Self {
        let measured = format!("{count} in {:.2} s", time.as_secs_f64());
        let value = count as f64 / time.as_secs_f64();
        Self { name: name.into(), measured, value: Some(value), unit: " /s", target }
    }

    /// How far the slow ones are from the usual ones.
    pub(crate) fn spread(name: &str, samples: &Samples, target: Target) -> Self {
        let value = samples.at(0.99).zip(samples.at(0.5)).map(|(slow, usual)| slow / usual);
        Self { name: name.into(), measured: times(samples), value, unit: "x", target }
    }

    pub(crate) fn size(name: &str, bytes: u64, target: Target) -> Self {
        let size = bytes as f64 / f64::from(1 << 20);
        Self { name: name.into(), measured: "PSS".into(), value: Some(size), unit: " MB", target }
    }

    pub(crate) fn resident(name: &str, bytes: u64, target: Target) -> Self {
        Self { measured: "RSS".into(), ..Self::size(name, bytes, target) }
    }

    pub(crate) fn ticks(name: &str, ticks: u64, time: Duration, target: Target) -> Self {
        let measured = format!("{ticks} ticks in {} s", time.as_secs());
        let value = ticks as f64 / time.as_secs_f64();
        Self { name: name.into(), measured, value: Some(value), unit: " %", target }
    }

    pub(crate) fn is_met(&self) -> bool {
        match (self.target, self.value) {
            (Target::AtMost(most), Some(value)) => value <= most,
            (Target::AtLeast(least), Some(value)) => value >= least,
            _ => true,
        }
    }
}

fn times(samples: &Samples) -> String {
    // The best says what the code takes, the distance to the others what the machine's neighbours do.
    match (samples.at(0.0), samples.at(0.5), samples.at(0.99)) {
        (Some(best), Some(p50), Some(p99)) => {
            format!("best {best:.0}, p50 {p50:.0}, p99 {p99:.0} µs, n={}", samples.0.len())
        }
        _ => "not measured: interpreter missing".into(),
    }
}

pub(crate) fn table(rows: &[Row]) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "{:<45} {:>12} {:>12}   {:<4} measured", "what", "value", "target", "");
    for row in rows {
        let value = row.value.map_or_else(|| "–".into(), |value| format!("{value:.2}{}", row.unit));
        let target = match row.target {
            Target::AtMost(most) => format!("≤ {most}{}", row.unit),
            Target::AtLeast(least) => format!("≥ {least}{}", row.unit),
            Target::None => String::new(),
        };
        let verdict = match row.target {
            Target::None => "",
            _ if row.is_met() => "ok",
            _ => "MISS",
        };
        let _ = writeln!(out, "{:<45} {value:>12} {target:>12}   {verdict:<4} {}", row.name, row.measured);
    }
    out
}
