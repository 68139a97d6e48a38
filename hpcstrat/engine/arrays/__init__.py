"""Arrays: conversion between libraries, tests for shared memory, and packing."""
